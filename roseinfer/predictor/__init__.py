"""How long a model's answer to a prompt will be: a small classifier on the CPU, for where requests are received."""
