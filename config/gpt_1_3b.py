# The paper's largest model: 1.3B parameters, which it trained on 8 GPUs.
dataset = "openwebtext"

n_layer = 24
n_head = 16
n_embd = 2048
block_size = 2048
cos_attn = (1,)
activation_checkpointing = "block"

micro_batch_size = 4
batch_size = 512
batch_size_start = 64
batch_schedule = "linear"

max_tokens = 26_000_000_000  # 20 tokens a parameter
warmup_tokens = 375_000_000
learning_rate = 2e-4
min_lr = learning_rate / 10

gns_half_life_tokens = 100_000_000
eval_tokens = 200_000_000
eval_iters = 256
checkpoint_tokens = 200_000_000
