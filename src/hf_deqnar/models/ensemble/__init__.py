"""Several autoregressive models that translate together."""
