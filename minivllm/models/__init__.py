"""Model architectures, and finding and loading their weights."""
