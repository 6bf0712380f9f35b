"""The parts that models are put together from."""
