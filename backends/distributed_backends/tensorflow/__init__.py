"""TensorFlow, by MultiWorkerMirroredStrategy."""
