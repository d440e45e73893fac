#include "chapters/02_ddp/ddp.h"

#include <algorithm>
#include <functional>
#include <numeric>

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
  std::vector<std::string> lines;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace

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
    if (parameter.tensor.requires_grad()) trained.push_back(parameter);
  }
  SB_CHECK(!trained.empty(), "ddp: no parameter of ", module.type_name(),
           " requires a gradient; run the module itself");
  SB_CHECK(options.bucket_cap_mb > 0 && options.first_bucket_mb > 0,
           "ddp: bucket limits ", options.first_bucket_mb, " and ",
           options.bucket_cap_mb, " MiB; give sizes above 0");

  // Make sure that all ranks have the same model
  check_same_model();

  // Begin with rank 0's values
  broadcast_coalesced(group, module.parameters(), 0, "parameters");
  broadcast_coalesced(group, module.buffers(), 0, "buffers");

  // Build the buckets and hook every parameter
  reducer_ = std::make_shared<Reducer>(std::move(trained), group, options);
}

void DistributedDataParallel::check_same_model() {
  if (group_.size() == 1) return;
  std::string mine;
  for (const NamedTensor& parameter : module_.named_parameters()) {
    mine += describe(parameter) + "\n";
  }
  // Thousands of ranks: the texts themselves travel only where they differ
  const std::string digest = std::to_string(std::hash<std::string>()(mine));
  const std::vector<std::string> digests = group_.exchange(digest);
  if (std::count(digests.begin(), digests.end(), digest) == group_.size()) {
    return;
  }
  const std::vector<std::string> all = group_.exchange(mine);
  const std::vector<std::string> first = lines_of(all[0]);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    SB_CHECK(other.size() == first.size(), "ddp: rank 0 has ", first.size(),
             " parameters and rank ", rank, " has ", other.size(),
             "; build the same model on every rank");
    const auto [a, b] =
        std::mismatch(first.begin(), first.end(), other.begin());
    SB_FAIL("ddp: parameter ", a - first.begin(), " is ", *a, " on rank 0 and ",
            *b, " on rank ", rank, "; build the same model on every rank");
  }
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

  int root = 0;
  if (is_joining_) {
    // Agree on who still has samples
    status_ = tell_who_is_active(true);
    const auto ranks_end = status_.begin() + group_.size();
    const auto missing = std::find(status_.begin(), ranks_end, 0);
    SB_CHECK(
        missing == ranks_end || !join_options_.throw_on_early_termination,
        "ddp: rank ", missing - status_.begin(),
        " has no more batches while others do; give every rank equally many");
    root = static_cast<int>(std::find(status_.begin(), ranks_end, 1) -
                            status_.begin());
  }

  // Order the buckets as gradients arrive, once
  if (RankContext::current().grad_enabled) reducer_->rebuild_buckets();

  // Share rank 0's running statistics
  if (last_forward_synced_) broadcast_buffers(root);
}

void DistributedDataParallel::after_forward(const Tensors& outputs) {
  last_forward_synced_ = will_reduce();
  if (!RankContext::current().grad_enabled) return;
  if (!will_reduce()) {
    reducer_->expect_nothing();
    return;
  }
  double divisor = group_.size();
  if (is_joining_ && !join_options_.divide_by_initial_world_size) {
    divisor =
        std::accumulate(status_.begin(), status_.begin() + group_.size(), 0);
  }
  reducer_->expect_reduction(outputs, divisor);

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

// --- Uneven inputs -----------------------------------------------------------

// One flag per rank, and how many of them will reduce in this backward.
std::vector<std::int32_t> DistributedDataParallel::tell_who_is_active(
    bool is_active) {
  std::vector<std::int32_t> status(static_cast<std::size_t>(group_.size() + 1));
  if (is_active) status[static_cast<std::size_t>(group_.rank())] = 1;
  status.back() = is_active && will_reduce();
  MemoryScope kind(MemoryKind::kCommunication);
  const Tensor message = Tensor::from_values<std::int32_t>(
      status, {static_cast<std::int64_t>(status.size())});
  group_.all_reduce(message, ReduceOp::kSum, "join").wait();
  return message.to_vector<std::int32_t>();
}

void DistributedDataParallel::join(const std::function<void()>& body,
                                   const JoinOptions& options) {
  is_joining_ = true;
  join_options_ = options;
  body();
  reducer_->check_finished();

  // Answer the others' calls until nobody has samples
  std::vector<std::int32_t> last = status_;
  for (;;) {
    const std::vector<std::int32_t> status = tell_who_is_active(false);
    const int num_active =
        std::accumulate(status.begin(), status.begin() + group_.size(), 0);
    if (num_active == 0) break;
    SB_CHECK(!options.throw_on_early_termination, "ddp: rank ", group_.rank(),
             " has no more batches while others do; give every rank equally "
             "many");
    last = status;
    shadow_one_forward(status);
  }
  is_joining_ = false;

  // The last rank that trained has the final weights
  if (!last.empty()) {
    const auto end = last.begin() + group_.size();
    const int root =
        static_cast<int>(std::find(last.begin(), end, 1) - last.begin());
    broadcast_coalesced(group_, module_.parameters(), root, "parameters");
    broadcast_coalesced(group_, module_.buffers(), root, "buffers");
  }
  last_forward_synced_ = true;
}

void DistributedDataParallel::shadow_one_forward(
    const std::vector<std::int32_t>& status) {
  const auto end = status.begin() + group_.size();
  const int num_active = std::accumulate(status.begin(), end, 0);
  reducer_->rebuild_buckets();
  if (last_forward_synced_) {
    broadcast_buffers(
        static_cast<int>(std::find(status.begin(), end, 1) - status.begin()));
  }
  const int num_reducing = status.back();
  SB_CHECK(num_reducing == 0 || num_reducing == num_active,
           "ddp: ", num_reducing, " of ", num_active,
           " ranks are about to reduce; "
           "no_sync must cover the same steps on all ranks");
  last_forward_synced_ = num_reducing > 0;
  if (num_reducing == 0) return;
  reducer_->reduce_zeros(
      join_options_.divide_by_initial_world_size ? group_.size() : num_active);
}

}  // namespace shardbook::ddp
