"""What is counted, logged and watched."""
