# The paper's main model and schedule (Gray et al. 2024, arXiv 2411.00999): 111M parameters, 20 tokens each.
# python data/openwebtext/prepare.py, then python train.py config/gpt_111m.py
dataset = "openwebtext"

n_layer = 10
n_head = 12
n_embd = 768
block_size = 2048
cos_attn = (1,)  # keeps block 1's attention from diverging in bf16

micro_batch_size = 8
batch_size = 15 * micro_batch_size
batch_size_start = 2 * micro_batch_size
batch_schedule = "linear"

max_tokens = 2_219_950_080
warmup_tokens = 374_784_000
learning_rate = 1.17e-3
min_lr = learning_rate / 10

gns_half_life_tokens = 20_000_000
eval_tokens = 50_000_000
eval_iters = 256
checkpoint_tokens = 50_000_000
