"""Training objectives: a proxy target, a proxy input and a likelihood (Huang et al. 2022)."""
