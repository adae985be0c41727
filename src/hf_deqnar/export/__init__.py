"""Export of a model to ONNX, and the runtime of exports."""
