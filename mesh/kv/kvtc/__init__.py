"""KV as transform coding: one basis over all layers and heads, bits where they matter, entropy coded (after KVTC,
arXiv 2511.01815)."""
