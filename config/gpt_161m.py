# The larger sibling of gpt_111m at the same training FLOPs: 15 heads of 64, so more parameters and fewer tokens.
dataset = "openwebtext"

n_layer = 10
n_head = 15
n_embd = 960
block_size = 2048
cos_attn = (1,)

micro_batch_size = 8
batch_size = 15 * micro_batch_size
batch_size_start = 2 * micro_batch_size
batch_schedule = "linear"

max_tokens = 1_532_000_000  # 2.22e9 tokens x 111M / 161M parameters
warmup_tokens = 258_000_000
learning_rate = 1.17e-3
min_lr = learning_rate / 10

gns_half_life_tokens = 20_000_000
eval_tokens = 50_000_000
eval_iters = 256
checkpoint_tokens = 50_000_000
