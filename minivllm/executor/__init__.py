"""The line between deciding and computing: an executor hands a step to workers and brings back new tokens."""
