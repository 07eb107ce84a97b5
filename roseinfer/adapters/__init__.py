"""LoRA adapters in a runner: files, host memory, slots on the device, and products that add them."""
