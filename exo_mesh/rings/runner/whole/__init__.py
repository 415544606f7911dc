"""The runner of a whole-model engine: an instance of one peer that speaks the driver's protocol outwards."""
