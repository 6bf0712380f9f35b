"""Operations on tensors. `reference` is the definition in plain torch; `triton` and `cpu` are fast where they run."""
