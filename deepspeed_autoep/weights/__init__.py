"""Weights in safetensors files: read into a model on the meta device part by part, and written for others to read."""
