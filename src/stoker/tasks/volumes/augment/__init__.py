"""What happens to patches on the device: turned and resampled, darkened, blurred."""
