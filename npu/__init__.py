"""Where the cache is used: attention runtimes, decoder, tokenizer, sampler and engine."""
