"""What happens to a batch on the device, between the loader's bytes and the model's numbers."""
