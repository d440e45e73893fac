// Virtual time on the cluster `textbook` against the page's closed form.

#include "tests/chapters/14_hybrid_3d/support.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

using namespace textbook;

struct Mesh3 {
  int d = 2, t = 2, p = 2, zero = 0;
  double m = 4, layers = 1;  ///< blocks per stage
  double b = 4, s = 64, h = 128, heads = 8, vocabulary = 8192;
  int ep = 1;
  double experts = 1;

  /// Products of `flops` operations, cut over the tp group.
  double product(double flops) const { return flops * b * s / t / kRate; }
  double x() const { return 4 * b * s * h; }  // bytes of an activation
  double a() const { return all_reduce(t, x()); }
  double mlp_forward() const { return 2 * product(8 * h * h) + a(); }
  double mlp_backward() const {
    const double c_fc = product(8 * h * h);
    return 2 * product(8 * h * h) + c_fc + std::max(c_fc, a());
  }
  /// Slots of all experts, as bytes; slots travel to them and back.
  double slots() const { return experts * std::ceil(b * s / experts); }
  double exchanges() const {
    return 2 * all_gather(ep, 4 * slots() * h / t) +
           all_gather(t, 4 * slots() * h);
  }
  double gate() const { return 2 * b * s * h * experts / kRate; }
  double expert() const { return 8 * slots() * h * h / t / kRate; }
  double block_forward() const {
    const double attention = product(8 * h * h) + product(2 * (s + 1) * h);
    return attention + a() +
           (experts > 1 ? gate() + exchanges() + 2 * expert() : mlp_forward());
  }
  double block_backward() const {
    const double c_attn = product(6 * h * h);
    return 2 * product(2 * h * h) + 2.5 * product(2 * (s + 1) * h) + c_attn +
           std::max(c_attn, a()) +
           (experts > 1 ? 2 * gate() + exchanges() + 4 * expert()
                        : mlp_backward());
  }
  double head() const { return product(2 * h * vocabulary); }
  double loss() const { return 3 * all_reduce(t, 4 * b * s); }

  /// Elements of the first stage: cut matrices, the table, what is whole, and
  /// experts.
  double cut() const {
    return layers * (experts > 1 ? 4 * h * h + 3 * h : 12 * h * h + 7 * h) / t;
  }
  double table() const { return vocabulary * h / t; }
  double whole() const {
    return s * h + layers * (experts > 1 ? 5 * h + h * experts : 6 * h);
  }
  double of_experts() const {
    return layers * experts / ep * (8 * h * h + 5 * h);
  }

  double update() const {
    const double norm = all_reduce(d * t * p, 16);
    // Without tensor parallelism nothing is replicated apart
    std::vector<double> buckets = {cut() + whole()};
    if (t > 1) buckets = {cut(), whole()};
    // Experts of which each replica has all are parameters like the others
    const bool joins = ep == 1 && t == 1;
    if (experts > 1 && joins) buckets[0] += of_experts();
    double sum = all_reduce(d, 4 * table());
    for (const double numel : buckets) sum += all_reduce(d, 4 * numel);
    if (experts > 1 && !joins) {
      sum += all_reduce(d / ep * t, 4 * of_experts());
    }
    const double tied = 4 * table() / (zero == 1 ? d : 1);
    return sum + all_reduce(2, tied) + norm;
  }

  double step_s() const {
    const double f = layers * block_forward(), g = layers * block_backward();
    const double last = f + head() + loss() + g + 2 * head() + a();
    return a() + (p - 1) * (f + g + 2 * message(x())) + m * last + update();
  }
};

double counted_s(const Mesh3& mesh) {
  HybridOptions how;
  how.dp = mesh.d, how.tp = mesh.t, how.pp = mesh.p;
  how.zero_stage = mesh.zero;
  how.ep = mesh.ep, how.experts = static_cast<std::int64_t>(mesh.experts);
  how.micro_batches = static_cast<std::int64_t>(mesh.m);
  how.bucket_bytes = std::int64_t{1} << 40;
  // Equally many blocks per stage; the first and the last have one layer more
  const int each = static_cast<int>(mesh.layers);
  for (int stage = 0; stage < mesh.p; ++stage) {
    const bool is_end = stage == 0 || stage == mesh.p - 1;
    how.partition = (stage == 0 ? "" : how.partition + ",") +
                    std::to_string(each + (is_end ? 1 : 0));
  }
  Options options = mlp_options(
      ranks_of(how), static_cast<std::int64_t>(mesh.d * mesh.m * mesh.b));
  const auto number = [](double value) {
    return std::to_string(static_cast<std::int64_t>(value));
  };
  options.model = "{\"n_embd\": " + number(mesh.h) +
                  ", \"n_layer\": " + number(mesh.layers * mesh.p) +
                  ", \"n_head\": " + number(mesh.heads) +
                  ", \"vocab_size\": " + number(mesh.vocabulary) +
                  ", \"n_positions\": " + number(mesh.s) + "}";
  options.seq = static_cast<std::int64_t>(mesh.s);
  return train_on(options, how).time.step_s;
}

TEST(HybridTextbook, AStepIsThePagesFormula) {
  for (const int p : {2, 4}) {
    for (const int t : {1, 2, 4}) {
      for (const int d : {1, 2, 4}) {
        for (const int zero : {0, 1}) {
          for (const double m : {4.0, 9.0}) {
            Mesh3 mesh;
            mesh.p = p, mesh.t = t, mesh.d = d, mesh.zero = zero, mesh.m = m;
            if (p == 4) mesh.layers = 2, mesh.vocabulary = 16384;
            SCOPED_TRACE("p " + std::to_string(p) + " t " + std::to_string(t) +
                         " d " + std::to_string(d) + " zero " +
                         std::to_string(zero));
            expect_time(counted_s(mesh), mesh.step_s());
          }
        }
      }
    }
  }
}

TEST(HybridTextbook, AStepWithExpertsIsThePagesFormula) {
  for (const int p : sized<int>({2, 4}, {2})) {
    for (const int t : {1, 2}) {
      for (const int d : {2, 4}) {
        for (int ep = 1; ep <= d; ep *= 2) {
          for (const int zero : {0, 1}) {
            Mesh3 mesh;
            mesh.p = p, mesh.t = t, mesh.d = d, mesh.zero = zero;
            mesh.ep = ep, mesh.experts = 8;
            mesh.vocabulary = 65536;
            if (p == 4) mesh.layers = 2;
            if (ep == 2) mesh.b = 3, mesh.s = 36, mesh.m = 5;  // 14 slots
            SCOPED_TRACE("p " + std::to_string(p) + " t " + std::to_string(t) +
                         " d " + std::to_string(d) + " ep " +
                         std::to_string(ep) + " zero " + std::to_string(zero));
            expect_time(counted_s(mesh), mesh.step_s());
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardbook::hybrid
