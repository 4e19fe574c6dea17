// attention.cpp as torch operators, with their autograd in C++, as ln_autograd.cpp has it for the norm layers.

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

extern "C" int64_t attention_scratch(int backward, int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half,
                                     int threads);
extern "C" void attention_forward(const void* qkv, void* out, float* lse, void* scratch, int64_t B, int64_t T, int64_t H,
                                  int64_t D, float cosine_eps, int half, int threads);
extern "C" void attention_backward(const void* dout, const void* qkv, const void* out, const float* lse, void* dqkv,
                                   void* scratch, int64_t B, int64_t T, int64_t H, int64_t D, float cosine_eps, int half,
                                   int threads);

namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) { return at::detail::empty_cpu(sizes, dtype); }

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

struct AttentionBackward : torch::autograd::Node {
    SavedVariable qkv, out, lse;
    int64_t heads;
    double eps;

    variable_list apply(variable_list&& grads) override {
        TORCH_CHECK(!at::GradMode::is_enabled(), "the attention kernel's backward pass cannot be differentiated again: "
                    "create_graph=True needs attention_impl='torch'");
        std::lock_guard<std::mutex> lock(mutex_);
        if (!grads[0].defined()) return {Tensor()};
        // under activation checkpointing, this runs the forward pass again
        const Tensor input = qkv.unpack(), output = out.unpack(getptr());
        return {run_backward(grads[0], input, output, lse.unpack(), heads, eps)};
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable* saved : {&qkv, &out, &lse}) saved->reset_data();
    }

    std::string name() const override { return "AttentionBackward"; }
};

Tensor attention(const Tensor& qkv, int64_t heads, double eps) {
    using namespace torch::autograd;
    if (const auto& functorch = at::functorch::functorchTLSAccessor()) functorch->checkSupportsCppAutogradFunction();
    TORCH_CHECK(!isFwGradDefined(qkv), "the attention kernel has no forward-mode derivative: attention_impl='torch' has one");
    const auto forward = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return run_forward(qkv, heads, eps);
    };
    if (!compute_requires_grad(qkv)) return std::get<0>(forward());
    const auto node = c10::make_intrusive<AttentionBackward>();
    node->set_next_edges(collect_next_edges(qkv));
    auto [out, lse] = forward();
    set_history(out, node);
    node->qkv = SavedVariable(qkv, false);
    node->out = SavedVariable(out, true);
    node->lse = SavedVariable(lse, false);
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
