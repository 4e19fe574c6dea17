// ln_kernel.cpp as torch operators. build.py compiles both files into one library; ln_kernel.py says what the arguments mean.

#include <ATen/autocast_mode.h>

#include "glue.h"

extern "C" void norm_forward(const void* x, const void* branch, void* sum, const float* w, const float* b, void* y,
                             float* stats, int64_t rows, int64_t C, float eps, int rms, int dtypes, int threads);
extern "C" void norm_backward(const void* dy, const void* ds, const void* x, const float* w, const float* stats,
                              const float* metric, void* dx, float* dw, float* db, float* sq, int64_t B, int64_t T, int64_t C,
                              int rms, int dtypes, int threads);
extern "C" void norm_tap(const void* dy, const void* x, float* rows, int64_t B, int64_t T, int64_t C, float eps, int rms,
                         int bias, int dtypes, int threads);

namespace {

constexpr const char *kWhose = "the norm layers", *kSetting = "norm_impl='torch'";

// The usual case first: calls are short, and each operation on the way counts.
Tensor as_float(const Maybe& t) {
    if (!t) return Tensor();
    return t->scalar_type() == at::kFloat && t->is_contiguous() ? *t : t->to(at::kFloat).contiguous();
}

Tensor as_dtype(const Tensor& t, at::ScalarType dtype) { return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype); }

Tensor contiguous(const Maybe& t) { return t ? t->contiguous() : Tensor(); }

// Below, waking a thread costs more than it saves.
int threads_for(const Tensor& x) { return x.numel() >= 32768 ? at::get_num_threads() : 1; }

int dtypes_of(at::ScalarType x, at::ScalarType y) {
    TORCH_CHECK((x == at::kFloat && (y == at::kFloat || y == at::kBFloat16)) || (x == at::kBFloat16 && y == x),
                "no norm kernel from ", x, " to ", y);
    return x == at::kBFloat16 ? 2 : y == at::kBFloat16;
}

// x + branch (undefined without a branch), y, stats
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& input, const Maybe& branch, const Tensor& weight, const Maybe& bias,
                                           double eps, bool rms, at::ScalarType dtype) {
    for (const Tensor& t : {input, weight, branch.value_or(input)})
        TORCH_CHECK(!t.key_set().has(c10::DispatchKey::Python), "the cpu norm kernel needs plain tensors with memory");
    TORCH_CHECK(input.numel() > 0, "a norm layer got an empty tensor of shape ", input.sizes());
    const Tensor x = input.contiguous(), w = as_float(weight), b = as_float(bias), r = contiguous(branch);
    TORCH_CHECK(!branch || (r.scalar_type() == dtype && r.sizes() == x.sizes()), "the branch needs x's shape and y's dtype");
    const int64_t C = x.size(-1), rows = x.numel() / C;
    Tensor y = empty(x.sizes(), dtype), stats = empty({rms ? 1 : 2, rows}), sum;
    if (branch) sum = empty(x.sizes(), x.scalar_type());
    norm_forward(data(x), data(r), data(sum), data<float>(w), data<float>(b), data(y), data<float>(stats), rows, C, eps, rms,
                 dtypes_of(x.scalar_type(), dtype), threads_for(x));
    return {sum, y, stats};
}

// dx, dbranch, dweight, dbias, sq; undefined what is not there
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Maybe& dsum, const Tensor& dout, const Tensor& input,
                                                            const Tensor& weight, const Tensor& stats, const Maybe& metric,
                                                            bool rms, bool has_bias, bool tracked,
                                                            std::optional<at::ScalarType> branch_dtype) {
    const Tensor ds = contiguous(dsum), dy = dout.contiguous(), x = input.contiguous(), w = as_float(weight);
    const Tensor p = as_float(metric);
    const int64_t B = x.size(0), C = x.size(-1), T = stats.size(1) / B;
    Tensor dx = empty(x.sizes(), x.scalar_type()), dw = empty(C), db, sq;
    if (has_bias) db = empty(C);
    if (tracked) sq = empty({(rms ? 1 : 2) * (p.defined() ? 2 : 1), B});
    norm_backward(data(dy), data(ds), data(x), data<float>(w), data<float>(stats), data<float>(p), data(dx), data<float>(dw),
                  data<float>(db), data<float>(sq), B, T, C, rms, dtypes_of(x.scalar_type(), dy.scalar_type()),
                  threads_for(x));
    return {dx, branch_dtype ? as_dtype(dx, *branch_dtype) : Tensor(), as_dtype(dw, weight.scalar_type()),
            as_dtype(db, weight.scalar_type()), sq};
}

struct NormBackward : KernelNode<4> {   // keeps what was normalised, weight, stats, metric
    std::optional<at::ScalarType> branch_dtype;
    bool rms, has_bias, tracked;

    // gradients of x + branch (undefined without a branch) and of y -> of x, branch, weight, bias, probe
    variable_list apply(variable_list&& grads) override {
        refuse_second_derivative(kWhose, kSetting);
        std::lock_guard<std::mutex> lock(mutex_);
        const Tensor &ds = grads[branch_dtype ? 1 : 0], &dy = grads[0];
        if (!dy.defined()) return {ds, ds, Tensor(), Tensor(), Tensor()};   // y was not used
        // under activation checkpointing, this runs the forward pass again
        const Tensor x = kept[0].unpack(getptr()), weight = kept[1].unpack(), stats = kept[2].unpack(), p = kept[3].unpack();
        const auto given = [](const Tensor& t) { return t.defined() ? Maybe(t) : std::nullopt; };
        auto [dx, dbranch, dw, db, sq] = backward(branch_dtype ? given(ds) : std::nullopt, dy, x, weight, stats, given(p), rms,
                                                  has_bias, tracked, std::nullopt);
        return {dx, branch_dtype ? dx : Tensor(), dw, db, sq};   // autograd casts to the branch's dtype
    }

    std::string name() const override { return "NormBackward"; }
};

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Maybe& branch, const Tensor& weight, const Maybe& bias,
                                const Maybe& probe, const Maybe& metric, double eps, bool rms) {
    using namespace torch::autograd;
    refuse_transforms({x, branch, weight, bias}, kWhose, kSetting);
    const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
    const at::ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(at::kCPU) : x.scalar_type();
    const auto compute = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return forward(x, branch, weight, bias, eps, rms, dtype);
    };
    if (!compute_requires_grad(x, branch, weight, bias, probe)) {
        auto [sum, y, stats] = compute();
        return {sum, y};
    }
    const auto node = c10::make_intrusive<NormBackward>();
    node->set_next_edges(collect_next_edges(x, branch, weight, bias, probe));
    auto [sum, y, stats] = compute();
    set_history(y, node);
    if (branch) set_history(sum, node);
    node->kept = {SavedVariable(branch ? sum : x, branch.has_value()), SavedVariable(weight, false),
                  SavedVariable(stats, false), SavedVariable(metric, false)};
    if (branch) node->branch_dtype = branch->scalar_type();
    node->rms = rms;
    node->has_bias = bias.has_value();
    node->tracked = probe.has_value();
    return {sum, y};
}

Tensor tap(const Tensor& dout, const Tensor& input, double eps, bool rms, bool bias) {
    const Tensor dy = dout.contiguous(), x = input.contiguous();
    TORCH_CHECK(x.numel() > 0 && x.sizes() == dy.sizes(), "a tap needs x and dy of one shape, got ", x.sizes(), " and ",
                dy.sizes());
    const int64_t B = x.size(0), C = x.size(-1), T = x.numel() / (B * C);
    Tensor rows = empty({B, (bias ? 2 : 1) * C});
    norm_tap(data(dy), data(x), data<float>(rows), B, T, C, eps, rms, bias, dtypes_of(x.scalar_type(), dy.scalar_type()),
             threads_for(x));
    return rows;
}

}  // namespace

TORCH_LIBRARY(rightbatch_cpu, m) {
    m.def("norm(Tensor x, Tensor? branch, Tensor weight, Tensor? bias, Tensor? probe, Tensor? metric, float eps, bool rms) "
          "-> (Tensor, Tensor)");
    m.def("forward(Tensor x, Tensor? branch, Tensor weight, Tensor? bias, float eps, bool rms, ScalarType dtype) "
          "-> (Tensor, Tensor, Tensor)");
    m.def("backward(Tensor? dsum, Tensor dy, Tensor x, Tensor weight, Tensor stats, Tensor? metric, bool rms, bool has_bias, "
          "bool tracked, ScalarType? branch_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("tap(Tensor dy, Tensor x, float eps, bool rms, bool bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, CPU, m) {   // where autograd is out of the way, in inference mode, it adds nothing
    m.impl("norm", norm);
    m.impl("forward", forward);
    m.impl("backward", backward);
    m.impl("tap", tap);
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, AutogradCPU, m) { m.impl("norm", norm); }
