"""The application: everything but the architectures and the strategies."""
