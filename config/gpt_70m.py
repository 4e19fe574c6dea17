# The smaller sibling of gpt_111m at the same training FLOPs: 9 heads of 64, so fewer parameters and more tokens.
dataset = "openwebtext"

n_layer = 10
n_head = 9
n_embd = 576
block_size = 2048
cos_attn = (1,)

micro_batch_size = 8
batch_size = 15 * micro_batch_size
batch_size_start = 2 * micro_batch_size
batch_schedule = "linear"

max_tokens = 3_524_000_000  # 2.22e9 tokens x 111M / 70M parameters
warmup_tokens = 374_784_000
learning_rate = 1.17e-3
min_lr = learning_rate / 10

gns_half_life_tokens = 20_000_000
eval_tokens = 50_000_000
eval_iters = 256
checkpoint_tokens = 50_000_000
