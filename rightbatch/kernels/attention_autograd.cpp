// attention.cpp as torch operators, with their autograd in C++, as ln_autograd.cpp has it for the norm layers.

#include "glue.h"

extern "C" int64_t attention_scratch(int backward, int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half,
                                     int threads);
extern "C" void attention_forward(const void* qkv, void* out, float* lse, void* scratch, int64_t B, int64_t T, int64_t H,
                                  int64_t D, float cosine_eps, int half, int threads);
extern "C" void attention_backward(const void* dout, const void* qkv, const void* out, const float* lse, void* dqkv,
                                   void* scratch, int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half,
                                   int threads);

namespace {

constexpr const char *kWhose = "the attention kernel", *kSetting = "attention_impl='torch'";

// Below, waking a thread costs more than it saves. By multiplications: T * T / 2 * C for each example.
int threads_for(int64_t B, int64_t T, int64_t C) { return B * T * T * C >= 1 << 18 ? at::get_num_threads() : 1; }

std::tuple<Tensor, Tensor> run_forward(const Tensor& input, int64_t heads, double eps) {
    TORCH_CHECK(!input.key_set().has(c10::DispatchKey::Python), "the attention kernel needs a plain tensor with memory");
    const at::ScalarType dtype = input.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "no attention kernel for ", dtype);
    TORCH_CHECK(input.dim() == 3 && heads > 0 && input.size(2) % (3 * heads) == 0 && input.numel() > 0,
                "expected qkv (B, T, 3 * heads * size) with ", heads, " heads, got ", input.sizes());
    const Tensor qkv = input.contiguous();
    const int64_t B = qkv.size(0), T = qkv.size(1), C = qkv.size(2) / 3;
    Tensor out = empty({B, T, C}, dtype), lse = empty({B, heads, T}, at::kFloat);
    const int half = dtype == at::kBFloat16, threads = threads_for(B, T, C);
    const Tensor scratch = empty(attention_scratch(false, B, T, heads, C / heads, eps, half, threads), at::kByte);
    attention_forward(qkv.data_ptr(), out.data_ptr(), lse.data_ptr<float>(), scratch.data_ptr(), B, T, heads, C / heads, eps,
                      half, threads);
    return {out, lse};
}

Tensor run_backward(const Tensor& grad, const Tensor& input, const Tensor& output, const Tensor& lse, int64_t heads,
                    double eps) {
    const Tensor dout = grad.to(input.scalar_type()).contiguous(), qkv = input.contiguous(), out = output.contiguous();
    const int64_t B = qkv.size(0), T = qkv.size(1), C = qkv.size(2) / 3;
    Tensor dqkv = empty(qkv.sizes(), qkv.scalar_type());
    const int half = qkv.scalar_type() == at::kBFloat16, threads = threads_for(B, T, C);
    const Tensor stats = lse.contiguous();
    const Tensor scratch = empty(attention_scratch(true, B, T, heads, C / heads, eps, half, threads), at::kByte);
    attention_backward(dout.data_ptr(), qkv.data_ptr(), out.data_ptr(), stats.data_ptr<float>(), dqkv.data_ptr(),
                       scratch.data_ptr(), B, T, heads, C / heads, eps, half, threads);
    return dqkv;
}

struct AttentionBackward : KernelNode<3> {   // keeps qkv, output, lse
    int64_t heads;
    double eps;

    variable_list apply(variable_list&& grads) override {
        refuse_second_derivative(kWhose, kSetting);
        std::lock_guard<std::mutex> lock(mutex_);
        if (!grads[0].defined()) return {Tensor()};
        // under activation checkpointing, this runs the forward pass again
        const Tensor qkv = kept[0].unpack(), out = kept[1].unpack(getptr());
        return {run_backward(grads[0], qkv, out, kept[2].unpack(), heads, eps)};
    }

    std::string name() const override { return "AttentionBackward"; }
};

Tensor attention(const Tensor& qkv, int64_t heads, double eps) {
    using namespace torch::autograd;
    refuse_transforms({qkv}, kWhose, kSetting);
    const auto compute = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return run_forward(qkv, heads, eps);
    };
    if (!compute_requires_grad(qkv)) return std::get<0>(compute());
    const auto node = c10::make_intrusive<AttentionBackward>();
    node->set_next_edges(collect_next_edges(qkv));
    auto [out, lse] = compute();
    set_history(out, node);
    node->kept = {SavedVariable(qkv, false), SavedVariable(out, true), SavedVariable(lse, false)};
    node->heads = heads;
    node->eps = eps;
    return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rightbatch_cpu, m) {
    m.def("attention(Tensor qkv, int heads, float eps) -> Tensor");
    m.def("attention_forward(Tensor qkv, int heads, float eps) -> (Tensor, Tensor)");
    m.def("attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, int heads, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, CPU, m) {
    m.impl("attention", attention);
    m.impl("attention_forward", run_forward);
    m.impl("attention_backward", run_backward);
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, AutogradCPU, m) { m.impl("attention", attention); }
