#include "chapters/02_ddp/ddp.h"

#include <algorithm>
#include <functional>
#include <sstream>

#include "comm/coalesce.h"
#include "core/check.h"

namespace shardbook::ddp {
namespace {

std::string describe(const NamedTensor& parameter) {
  return "'" + parameter.name + "' " + dtype_name(parameter.tensor.dtype()) +
         shape_text(parameter.tensor.shape()) +
         (parameter.tensor.requires_grad() ? "" : " (frozen)");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_same_model(const std::string& caller, Module& module,
                      ProcessGroup& group) {
  if (group.size() == 1) return;
  std::string mine;
  for (const NamedTensor& parameter : module.named_parameters()) {
    mine += describe(parameter) + "\n";
  }
  // Send the texts only if digests differ: there may be thousands of ranks
  const std::string digest = std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> digests = group.exchange(digest);
  if (std::count(digests.begin(), digests.end(), digest) == group.size()) {
    return;
  }
  const std::vector<std::string> all = group.exchange(mine);
  const std::vector<std::string> first = lines_of(all[0]);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    SB_CHECK(other.size() == first.size(), caller, ": rank 0 has ",
             first.size(), " parameters and rank ", rank, " has ", other.size(),
             "; build the same model on every rank");
    const auto [a, b] =
        std::mismatch(first.begin(), first.end(), other.begin());
    SB_FAIL(caller, ": parameter ", a - first.begin(), " is ", *a,
            " on rank 0 and ", *b, " on rank ", rank,
            "; build the same model on every rank");
  }
}

NoSync::NoSync(DistributedDataParallel& ddp)
    : ddp_(ddp), previous_(ddp.is_syncing_) {
  ddp_.is_syncing_ = false;
}

NoSync::~NoSync() { ddp_.is_syncing_ = previous_; }

// --- Construction ------------------------------------------------------------

DistributedDataParallel::DistributedDataParallel(Module& module,
                                                 ProcessGroup& group,
                                                 const DdpOptions& options)
    : module_(module), group_(group), options_(options) {
  std::vector<NamedTensor> trained;
  for (const NamedTensor& parameter : module.named_parameters()) {
    (parameter.tensor.requires_grad() ? trained : frozen_).push_back(parameter);
  }
  SB_CHECK(!trained.empty(), "ddp: no parameter of ", module.type_name(),
           " requires a gradient; run the module itself");
  SB_CHECK(options.bucket_cap_mb > 0 && options.first_bucket_mb > 0,
           "ddp: bucket limits ", options.first_bucket_mb, " and ",
           options.bucket_cap_mb, " MiB; give sizes above 0");

  // Make sure that all ranks have the same model
  check_same_model("ddp", module, group);

  // Begin with rank 0's values
  broadcast_coalesced(group, module.parameters(), 0, "parameters");
  broadcast_coalesced(group, module.buffers(), 0, "buffers");

  // Build the buckets and hook every parameter
  reducer_ = std::make_shared<Reducer>(std::move(trained), group, options);
}

// --- Forward -----------------------------------------------------------------

Tensor DistributedDataParallel::operator()(const Tensor& x) {
  before_forward();
  const Tensor output = module_(x);
  after_forward({output});
  return output;
}

Tensors DistributedDataParallel::operator()(const Tensors& inputs) {
  before_forward();
  const Tensors outputs = module_(inputs);
  after_forward(outputs);
  return outputs;
}

bool DistributedDataParallel::will_reduce() const {
  return is_syncing_ && RankContext::current().grad_enabled;
}

void DistributedDataParallel::before_forward() {
  has_run_ = true;
  // Complain about gradients that never came
  reducer_->check_finished();

  // And about those that nobody would average
  for (const NamedTensor& parameter : frozen_) {
    SB_CHECK(!will_reduce() || !parameter.tensor.requires_grad(), "ddp: '",
             parameter.name, "' was frozen at construction, so its gradient ",
             "would stay on this rank; construct DDP anew to train it");
  }

  // Agree on the ranks that still have samples
  if (is_joining_) status_ = agree_on_status(true);

  // Order the buckets as gradients arrive, once
  if (RankContext::current().grad_enabled) reducer_->rebuild_buckets();

  // Share rank 0's running statistics
  if (last_forward_synced_) {
    broadcast_buffers(is_joining_ ? status_.first_active() : 0);
  }
}

void DistributedDataParallel::after_forward(const Tensors& outputs) {
  last_forward_synced_ = will_reduce();
  if (!RankContext::current().grad_enabled) return;
  if (!will_reduce()) {
    reducer_->expect_nothing();
    return;
  }
  reducer_->expect_reduction(outputs,
                             is_joining_ ? join_divisor() : group_.size());

  // Notice a backward that comes too late to be reduced
  for (const Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.add_grad_hook(
        [watched = std::weak_ptr<Reducer>(reducer_)](const Tensor&) {
          if (const auto reducer = watched.lock()) reducer->check_expecting();
          return Tensor();
        });
  }
}

void DistributedDataParallel::broadcast_buffers(int root) {
  if (!options_.broadcast_buffers) return;
  broadcast_coalesced(group_, module_.buffers(), root, "buffers");
}

void DistributedDataParallel::register_comm_hook(CommHook hook) {
  SB_CHECK(!has_run_,
           "ddp: register_comm_hook after a forward; register it before");
  reducer_->set_comm_hook(std::move(hook));
}

}  // namespace shardbook::ddp
