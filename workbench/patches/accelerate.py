"""What is replaced in accelerate."""
