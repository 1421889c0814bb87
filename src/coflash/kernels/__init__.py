"""Device code, CuTe-DSL only: one folder per architecture, `parts` for what they share."""
