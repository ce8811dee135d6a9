"""The images of a training and its batches; independent of devices and strategies."""
