"""The operations that paging needs, on tensors. `reference` is the definition in plain torch."""
