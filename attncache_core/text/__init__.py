"""Turn texts into packed token sequences: tokenizer, prompts, labels."""
