"""Objects that dynamic loops leave alone."""


class Fixture:
    """Base of helper objects whose parts are all fixed before a loop, its registers being tensors.

    The DSL carries every object whose methods a dynamic loop calls through the loop as values.  Such an object has
    none to carry: what changes lives in register tensors, which the loop reaches from outside."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list):
        return self
