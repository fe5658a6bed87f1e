"""kvtc on the core: calibration of a model's basis, and the torch twin of the codec's products."""
