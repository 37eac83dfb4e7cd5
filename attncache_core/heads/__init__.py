"""Turn hidden states into answers: pooling, language head, classifiers and decisions."""
