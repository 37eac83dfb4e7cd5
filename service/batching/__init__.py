"""From a request to the engine and back: the queue, batches, and the threads that run them."""
