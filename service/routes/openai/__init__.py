"""The routes under /v1, in the shapes of OpenAI, vLLM and Cohere."""
