"""What runs on a device: the model, its cache, and sampling."""
