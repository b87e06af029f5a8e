"""The demonstration: a small language model on gloo and on tide, side by side. Run by ci/demo or
torchrun -m tide.demo."""
