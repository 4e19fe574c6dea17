# GPT-2's vocabulary on Wikitext-2: small enough for a laptop, real words. Prepare: python data/wikitext/prepare.py
dataset = "wikitext-2"

n_layer = 6
n_head = 6
n_embd = 192
block_size = 256
dropout = 0.1  # the corpus has 2.4M tokens, so it is seen several times

micro_batch_size = 4
batch_size = 32
batch_size_start = 4
batch_schedule = "linear"

max_tokens = 10_000_000
warmup_tokens = 500_000
learning_rate = 1e-3
min_lr = learning_rate / 10

gns_half_life_tokens = 500_000
eval_tokens = 1_000_000
checkpoint_tokens = 1_000_000
