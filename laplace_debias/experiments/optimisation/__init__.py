"""What the bias does to optimisers, and debiasing for them."""
