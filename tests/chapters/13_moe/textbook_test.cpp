// Virtual time on the cluster `textbook` against the page's closed form.

#include "tests/chapters/common/textbook_support.h"

#include <algorithm>
#include <cmath>

#include "chapters/13_moe/bill.h"
#include "chapters/13_moe/trainer.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "tests/support/sanitized.h"

namespace shardbook::moe {
namespace {

using namespace textbook;

struct ExpertMesh {
  int ep = 4, edp = 1, t = 1, zero = 0;
  bool expert_tp = false;
  double m = 1, layers = 3, experts = 8, k = 1;
  double b = 4, s = 64, h = 128, heads = 8, vocabulary = 512;

  int dp() const { return ep * edp; }
  int replicas() const { return edp * (expert_tp ? 1 : t); }
  double tokens() const { return b * s; }
  /// Slots of an expert.
  double slots() const {
    return std::max(4.0, std::ceil(tokens() * k / experts - 1e-6));
  }
  /// Products of `flops` operations per token, cut over the tp group.
  double product(double flops) const { return flops * tokens() / t / kRate; }
  double a() const { return all_reduce(t, 4 * tokens() * h); }

  /// One all-to-all of slots, one gather of slots over tp.
  double exchange() const {
    return all_gather(ep, 4 * experts * slots() * h / t);
  }
  double gather() const { return all_gather(t, 4 * experts * slots() * h); }
  /// One of the experts' two products, forward.
  double expert() const { return 8 * experts * slots() * h * h / t / kRate; }
  double gate() const { return 2 * tokens() * h * experts / kRate; }
  /// TP where it cuts experts: slots are gathered before them as well, and sums
  /// of hidden units travel.
  double cut_experts() const {
    const double sum = all_reduce(t, 4 * experts * slots() * h);
    return expert_tp ? gather() + sum : 0;
  }

  double forward() const {
    const double attention = product(8 * h * h) + product(2 * (s + 1) * h);
    return attention + a() + gate() + 2 * exchange() + 2 * expert() + gather() +
           cut_experts();
  }
  double attention_backward() const {
    const double c_attn = product(6 * h * h);
    return 2 * product(2 * h * h) + 2.5 * product(2 * (s + 1) * h) + c_attn +
           std::max(c_attn, a());
  }
  /// Behind the gradients of the experts' weights.
  double rest() const {
    const double sum = all_reduce(t, 4 * experts * slots() * h);
    return (expert_tp ? sum : 0) + exchange() + gather() + 2 * gate() +
           attention_backward();
  }
  double backward() const {
    const double cut = expert_tp ? gather() : 0;
    return cut + exchange() + 4 * expert() + rest();
  }
  double head() const { return product(2 * h * vocabulary); }
  double loss() const { return 3 * all_reduce(t, 4 * tokens()); }

  double dense() const {
    return vocabulary / t * h + s * h + 2 * h +
           layers * ((4 * h * h + 3 * h) / t + h + 4 * h + h * experts);
  }
  double expert_parameters() const {
    return layers * experts / ep *
           ((8 * h * h + 4 * h) / (expert_tp ? t : 1) + h);
  }
  /// What the loss, which travels during backward, takes beyond it. In a group
  /// of all ranks the exchanges wait behind it.
  double loss_left() const {
    const double all = all_reduce(dp(), 8);
    const bool shares_queue = ep == dp() && t == 1;
    const double hidden =
        shares_queue ? 2 * head() : 2 * head() + a() + layers * backward();
    return std::max(0.0, all - hidden);
  }
  /// Reduces what stages of ZeRO scatter; half of an all-reduce.
  double sums() const {
    if (zero == 0) {
      return all_reduce(dp(), 4 * dense()) +
             all_reduce(replicas(), 4 * expert_parameters()) + loss_left();
    }
    const auto padded = [](double n, int ranks) {
      return 4 * std::ceil(n / 2 / ranks) * 2 * ranks;
    };
    const double of_dense = all_gather(dp(), padded(dense(), dp()));
    const double of_experts =
        all_gather(replicas(), padded(expert_parameters(), replicas()));
    const bool shares_queue = ep == dp() && t == 1;
    const double each = std::max(of_experts - rest(), of_dense);
    const double last =
        shares_queue ? loss_left() + each
                     : std::max(of_experts - rest(), loss_left() + of_dense);
    return (zero == 2 ? m - 1 : 0) * each + last + of_dense + of_experts;
  }
  double step_s() const {
    const double micro =
        a() + layers * (forward() + backward()) + 3 * head() + a() + loss();
    return m * micro + sums() + all_reduce(dp() * t, 8);
  }
};

double counted_s(const ExpertMesh& mesh) {
  TrainerOptions how;
  how.ep = mesh.ep, how.tp = mesh.t, how.zero_stage = mesh.zero;
  how.micro_batches = static_cast<std::int64_t>(mesh.m);
  how.moe.gate.num_experts = static_cast<std::int64_t>(mesh.experts);
  how.moe.gate.k = static_cast<std::int64_t>(mesh.k);
  how.moe.expert_tensor_parallel = mesh.expert_tp;
  Options options =
      mlp_options(mesh.dp() * mesh.t,
                  static_cast<std::int64_t>(mesh.dp() * mesh.m * mesh.b));
  options.chapter = "13_moe";
  const auto number = [](double value) {
    return std::to_string(static_cast<std::int64_t>(value));
  };
  options.model = "{\"n_embd\": " + number(mesh.h) +
                  ", \"n_layer\": " + number(mesh.layers) +
                  ", \"n_head\": " + number(mesh.heads) +
                  ", \"vocab_size\": " + number(mesh.vocabulary) +
                  ", \"n_positions\": " + number(mesh.s) + "}";
  options.seq = static_cast<std::int64_t>(mesh.s);
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    DeviceMesh grid(world, expert_topology(group_sizes(as, how)));
    Trainer strategy(as, how, grid);
    run.train(as, strategy);
  };
  chapter.fold_class = fold_class(options, how);
  return run_and_compare(options, chapter).time.step_s;
}

void expect_formula(const std::string& name, const ExpertMesh& mesh) {
  SCOPED_TRACE(name + ": ep " + std::to_string(mesh.ep) + " edp " +
               std::to_string(mesh.edp) + " t " + std::to_string(mesh.t) +
               " zero " + std::to_string(mesh.zero) + " m " +
               std::to_string(mesh.m) + " k " + std::to_string(mesh.k) + " s " +
               std::to_string(mesh.s));
  expect_time(counted_s(mesh), mesh.step_s());
}

/// Even shapes, and odd ones: tokens that no expert count divides.
template <typename Expect>
void for_each_shape(ExpertMesh mesh, const Expect& expect) {
  for (const double m : sized<double>({1, 3}, {3})) {
    for (const double k : sized<double>({1, 2}, {2})) {
      mesh.m = m, mesh.k = k;
      expect(mesh);
      ExpertMesh odd = mesh;
      odd.b = 3, odd.s = 37, odd.h = 72, odd.heads = 4, odd.layers = 5;
      odd.vocabulary = 260;
      if (mesh.t == 1) odd.s = 35, odd.vocabulary = 257;
      expect(odd);
    }
  }
}

TEST(MoeTextbook, AStepIsThePagesFormula) {
  for (const int zero : sized<int>({0, 1, 2}, {0, 2})) {
    for_each_shape({8, 1, 1, zero}, [](const ExpertMesh& mesh) {
      expect_formula(mesh.zero > 0 ? "E+Z" : "E", mesh);
    });
    for_each_shape({2, 4, 1, zero}, [](const ExpertMesh& mesh) {
      expect_formula(mesh.zero > 0 ? "E+D+Z" : "E+D", mesh);
    });
  }
}

TEST(MoeTextbook, AStepWithTensorParallelismIsThePagesFormula) {
  for (const bool expert_tp : {false, true}) {
    for (const int zero : sized<int>({0, 1}, {1})) {
      for_each_shape({2, 2, 2, zero, expert_tp}, [](const ExpertMesh& mesh) {
        expect_formula("E+D+M", mesh);
      });
    }
  }
}

}  // namespace
}  // namespace shardbook::moe
