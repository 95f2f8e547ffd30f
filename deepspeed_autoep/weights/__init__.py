"""Weights that are read from safetensors files into a model on the meta device, part by part."""
