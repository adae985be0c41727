"""ONNX files of a model, and the runtime that solves with them."""
