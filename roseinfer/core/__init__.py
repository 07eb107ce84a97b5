"""Types that every other package uses: requests, sampling parameters, step plans, configs, errors. Standard library
only.
"""
