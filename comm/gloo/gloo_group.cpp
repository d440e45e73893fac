#include "comm/gloo/gloo_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "comm/gloo/calls.h"
#include "comm/gloo/collectives.h"
#include "comm/internal/arguments.h"
#include "comm/internal/backends.h"
#include "comm/internal/rank_device.h"
#include "comm/processes/rendezvous.h"
#include "comm/processes/socket.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::internal {
namespace {

std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 14695981039346656037u;  // FNV-1a
  for (const char c : text) {
    value = (value ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  // Spread the last bytes over all bits (the finisher of splitmix64).
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

GlooGroup::GlooGroup(std::shared_ptr<GlooWorld> world, std::string id, int rank,
                     std::vector<int> ranks, std::string name,
                     std::chrono::milliseconds timeout)
    : ProcessGroup(rank, std::move(ranks), std::move(name)),
      world_(std::move(world)),
      id_(std::move(id)),
      members_(join_ranks(this->ranks())),
      timeout_(timeout),
      queue_(std::make_shared<CallQueue>(*world_)) {
  world_->add_queue(queue_);
}

GlooGroup::~GlooGroup() { world_->release_queue(queue_); }

void GlooGroup::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
}

void GlooGroup::abort(const std::string& reason) { world_->fail(reason); }

std::vector<std::string> GlooGroup::exchange(const std::string& text) {
  const std::int64_t number = num_exchanges_++;
  if (size() == 1) return {text};
  return world_->line().exchange(id_ + "/exchange/" + std::to_string(number),
                                 members_, "exchange over '" + name() + "'",
                                 text, timeout_);
}

std::shared_ptr<ProcessGroup> GlooGroup::do_subgroup(
    const std::vector<int>& members, const std::string& name) {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(world_rank(member));
  const auto mine = std::find(members.begin(), members.end(), rank());
  // Groups made by one split differ in their members.
  return std::make_shared<GlooGroup>(
      world_, fmt::format("{}.{}:{}", id_, num_exchanges_, ranks.front()),
      static_cast<int>(mine - members.begin()), ranks, name, timeout_);
}

// --- One call ----------------------------------------------------------------

CallInfo GlooGroup::info_of(const CommCall& call) const {
  return {call_text(call) + " over '" + name() + "'", timeout_};
}

Channel GlooGroup::open(const CommCall& call) {
  Channel channel;
  channel.world = world_.get();
  channel.info = info_of(call);
  channel.rank = rank();
  channel.ranks = ranks();
  world_->check(channel.info);
  const std::string key = id_ + "/" + std::to_string(num_collectives_++);
  const std::string signature = signature_of(call);
  channel.slot = hash(key + signature);
  world_->line().report_call(key, members_, signature, channel.info.text);
  return channel;
}

Work GlooGroup::do_collective(const CommCall& call,
                              const CommBuffers& buffers) {
  // The buffers live as long as the call
  return CallQueue::enqueue(queue_, [channel = open(call), call, buffers] {
    run_collective(channel, call, buffers);
  });
}

Message GlooGroup::open_message(const CommCall& call, const void* data) {
  const bool is_send = call.op == CommOp::kSend;
  const int from = is_send ? rank() : call.root_or_peer;
  const int to = is_send ? call.root_or_peer : rank();
  const CallInfo info = info_of(call);
  world_->check(info);
  const std::string way = fmt::format("{}>{}/{}", from, to, call.tag);
  const std::string key =
      fmt::format("{}/{}/{}", id_, way, num_messages_[way]++);
  const std::string signature =
      fmt::format("{}[{}]", dtype_name(call.dtype), call.numel);
  world_->line().report_call(key,
                             join_ranks({world_rank(from), world_rank(to)}),
                             signature, info.text);
  return Message(
      *world_, info, is_send ? Message::Way::kSend : Message::Way::kRecv,
      world_rank(call.root_or_peer), hash(key + signature), data,
      static_cast<std::size_t>(call.numel) * dtype_bytes(call.dtype));
}

// --- Point to point ----------------------------------------------------------

Work GlooGroup::do_send(const Tensor& tensor, const CommCall& call) {
  if (tensor.bytes() > kEagerBytes) {
    return CallQueue::add_message(queue_, open_message(call, tensor.raw()),
                                  std::make_shared<Tensor>(tensor));
  }
  const auto* begin = static_cast<const char*>(tensor.raw());
  auto copy =
      std::make_shared<std::vector<char>>(begin, begin + tensor.bytes());
  // The queue owns the copy, so the caller need not wait
  (void)CallQueue::add_message(queue_, open_message(call, copy->data()), copy);
  return Work();
}

Work GlooGroup::do_recv(const Tensor& tensor, const CommCall& call) {
  return CallQueue::add_message(queue_, open_message(call, tensor.raw()),
                                std::make_shared<Tensor>(tensor));
}

// --- Ranks -------------------------------------------------------------------

bool has_gloo() { return true; }
void check_gloo() {}

void run_as_rank(const RankEnvironment& environment,
                 const std::function<void(ProcessGroup&)>& body,
                 const LaunchOptions& options) {
  // All ranks of a job make the same worlds in the same order.
  static std::atomic<std::uint64_t> next_generation{0};
  const int rank = environment.rank;
  const auto world =
      std::make_shared<GlooWorld>(environment, next_generation++, options);
  try {
    RankContext context(
        Device::cpu(rank, options.device_memory_bytes), rank,
        std::max(1, available_cores() / environment.local_world_size));
    context.deterministic = options.deterministic;
    const RankContext::Scope scope(context);
    GlooGroup group(world, "world", rank, ranks_below(environment.world_size),
                    "world", options.timeout);
    body(group);
    world->leave();
  } catch (...) {
    world->fail(current_reason());
    throw;
  }
}

namespace {

void check_gloo_ranks(int world_size, const LaunchOptions& options) {
  SB_CHECK(options.device != "cuda",
           "--backend gloo: it moves tensors of the CPU only; use --backend "
           "nccl or --backend threads with --device cuda");
  check_processes(world_size, options);
}

// In a process that is a rank it joins the world, runs `body` once, as that
// rank, and leaves. In any other it forks the ranks, so only what `body` prints
// or saves remains.
void run_gloo_ranks(int world_size,
                    const std::function<void(ProcessGroup&)>& body,
                    const LaunchOptions& options) {
  const auto environment = launched_rank(world_size, options);
  if (!environment) {
    run_processes(
        world_size,
        [&](ProcessGroup& world) {
          body(world);
          return std::string();
        },
        options);
    return;
  }
  run_as_rank(*environment, body, options);
}

}  // namespace

const Backend kGloo{"gloo", check_gloo_ranks, run_gloo_ranks};

}  // namespace shardbook::internal
