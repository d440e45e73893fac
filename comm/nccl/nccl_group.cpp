#include "comm/nccl/nccl_group.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "comm/processes/socket.h"
#include "core/check.h"
#include "core/context.h"
#include "core/stream.h"

namespace shardbook::internal {
namespace {

std::size_t numel_of(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel());
}

void check_device(const Tensor& tensor, const Device& mine,
                  const std::string& call) {
  SB_CHECK(tensor.device() == mine, call, ": the tensor is on ",
           tensor.device().name(),
           "; backend nccl moves tensors of the rank's ", "own GPU, ",
           mine.name());
}

}  // namespace

NcclGroup::NcclGroup(std::shared_ptr<NcclWorld> world, std::string id, int rank,
                     std::vector<int> ranks, std::string name,
                     std::chrono::milliseconds timeout,
                     NcclWorld::Communicator communicator)
    : ProcessGroup(rank, std::move(ranks), std::move(name)),
      world_(std::move(world)),
      id_(std::move(id)),
      members_(join_ranks(this->ranks())),
      timeout_(timeout),
      communicator_(std::move(communicator)) {
  if (size() == 1) return;
  stream_ = world_->take_stream();
  if (communicator_ != nullptr) return;
  communicator_ = world_->join(id_ + "/communicator", this->ranks(), rank,
                               this->name(), timeout_);
}

NcclGroup::~NcclGroup() {
  if (stream_ >= 0) world_->give_stream(stream_);
}

void NcclGroup::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
}

void NcclGroup::abort(const std::string& reason) { world_->fail(reason); }

// --- Over the line to the coordinator ----------------------------------------

std::vector<std::string> NcclGroup::exchange(const std::string& text) {
  const std::int64_t number = num_exchanges_++;
  if (size() == 1) return {text};
  return world_->line().exchange(id_ + "/exchange/" + std::to_string(number),
                                 members_, "exchange over '" + name() + "'",
                                 text, timeout_);
}

std::string NcclGroup::text_of(const CommCall& call) const {
  return call_text(call) + " over '" + name() + "'";
}

std::string NcclGroup::report(const CommCall& call) {
  const std::string text = text_of(call);
  world_->check(text);
  const std::string key = id_ + "/" + std::to_string(num_collectives_++);
  world_->line().report_call(key, members_, signature_of(call), text);
  return key;
}

Work NcclGroup::barrier(const CommCall& call) {
  const std::string key = report(call);
  world_->line().exchange(key + "/barrier", members_, text_of(call), "",
                          timeout_);
  return Work();
}

// --- Groups ------------------------------------------------------------------

std::shared_ptr<ProcessGroup> NcclGroup::make(const std::vector<int>& members,
                                              const std::string& name,
                                              bool all_call) {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(world_rank(member));
  const auto mine = std::find(members.begin(), members.end(), rank());
  const auto position = static_cast<int>(mine - members.begin());
  // Groups that are made by one call differ in their members.
  const std::string id = id_ + "." + join_ranks(members) + "#" +
                         std::to_string(num_made_[members]++);
  NcclWorld::Communicator communicator;
  if (all_call && size() > 1) {
    const int color = *std::min_element(members.begin(), members.end());
    communicator =
        world_->split(communicator_, stream_, color, position, name, timeout_);
  }
  return std::make_shared<NcclGroup>(world_, id, position, ranks, name,
                                     timeout_, std::move(communicator));
}

std::shared_ptr<ProcessGroup> NcclGroup::do_subgroup(
    const std::vector<int>& members, const std::string& name) {
  return make(members, name, false);
}

std::shared_ptr<ProcessGroup> NcclGroup::do_split(
    const std::vector<int>& members, const std::string& name) {
  return make(members, name, true);
}

// --- Collectives -------------------------------------------------------------

void* NcclGroup::address(const Tensor& tensor) const {
  const StreamScope scope(stream_);
  return tensor.raw();
}

Work NcclGroup::start(const CommCall& call, const CommBuffers& buffers,
                      bool moves, const NcclWorld::Run& run) {
  const std::string text = text_of(call);
  Tensors tensors;
  for (const Tensor& buffer : {buffers.output, buffers.input}) {
    if (!buffer.defined()) continue;
    check_device(buffer, world_->device(), text);
    tensors.push_back(buffer);
  }
  const std::string key = report(call);
  return world_->issue(
      communicator_, stream_,
      std::make_shared<NcclCall>(world_, text, key, timeout_, tensors),
      moves ? run : NcclWorld::Run());
}

Work NcclGroup::do_collective(const CommCall& call,
                              const CommBuffers& buffers) {
  switch (call.op) {
    case CommOp::kBarrier:
      return barrier(call);
    case CommOp::kAllReduce:
    case CommOp::kReduceScatter:
    case CommOp::kAllGather:
    case CommOp::kBroadcast:
    case CommOp::kReduce:
      break;
    default:
      return exchange_pieces(call, buffers);
  }
  const Tensor& counted =
      call.op == CommOp::kAllGather ? buffers.input : buffers.output;
  return start(
      call, buffers, call.numel > 0, [&](NcclCommunicator& nccl, void* stream) {
        nccl.call(
            {call.op, address(buffers.input), address(buffers.output),
             numel_of(counted), call.dtype, call.reduce_op, call.root_or_peer},
            stream);
      });
}

// --- Collectives made of messages --------------------------------------------

// Pieces end to end, of equal size if `counts` is empty; none for an undefined
// tensor.
std::vector<NcclGroup::Piece> NcclGroup::pieces_of(
    const Tensor& tensor, const std::vector<std::int64_t>& counts) const {
  std::vector<Piece> pieces;
  std::int64_t offset = 0;
  for (int r = 0; tensor.defined() && r < size(); ++r) {
    const std::int64_t count = counts.empty()
                                   ? tensor.numel() / size()
                                   : counts[static_cast<std::size_t>(r)];
    pieces.push_back({r, offset, count});
    offset += count;
  }
  return pieces;
}

// All sends and receives start together; a rank's piece for itself is a copy.
Work NcclGroup::exchange_pieces(const CommCall& call,
                                const CommBuffers& buffers) {
  // Pieces to and from each rank
  const Tensor &output = buffers.output, &input = buffers.input;
  std::vector<Piece> sent, received;
  if (call.op == CommOp::kScatter) {
    sent = pieces_of(input, {});
    received = {{call.root_or_peer, 0, output.numel()}};
  } else if (call.op == CommOp::kGather) {
    sent = {{call.root_or_peer, 0, input.numel()}};
    received = pieces_of(output, {});
  } else {
    sent = pieces_of(input, buffers.send_counts);
    received = pieces_of(output, buffers.recv_counts);
  }
  if (call.op == CommOp::kAllToAllV) {
    compare_counts(id_ + "/" + std::to_string(num_collectives_), call,
                   buffers.send_counts, buffers.recv_counts);
  }
  const auto size = static_cast<std::int64_t>(dtype_bytes(call.dtype));
  const auto at = [&](const Tensor& tensor, const Piece& piece) {
    return static_cast<std::byte*>(address(tensor)) + piece.offset * size;
  };
  const auto is_empty = [](const Piece& piece) { return piece.count == 0; };
  const bool moves = !std::all_of(sent.begin(), sent.end(), is_empty) ||
                     !std::all_of(received.begin(), received.end(), is_empty);
  return start(call, buffers, moves, [&](NcclCommunicator& nccl, void* stream) {
    // NCCL matches a send to oneself like any other.
    world_->library().begin_group();
    try {
      for (const Piece& piece : sent) {
        if (piece.count == 0) continue;
        nccl.call({CommOp::kSend, at(input, piece), nullptr,
                   static_cast<std::size_t>(piece.count), call.dtype,
                   ReduceOp::kSum, piece.peer},
                  stream);
      }
      for (const Piece& piece : received) {
        if (piece.count == 0) continue;
        nccl.call({CommOp::kRecv, nullptr, at(output, piece),
                   static_cast<std::size_t>(piece.count), call.dtype,
                   ReduceOp::kSum, piece.peer},
                  stream);
      }
    } catch (...) {
      world_->library().end_group();
      throw;
    }
    world_->library().end_group();
  });
}

// NCCL would wait forever for elements that nobody sends, so the coordinator
// compares the counts of each pair of ranks while the call runs.
void NcclGroup::compare_counts(const std::string& key, const CommCall& call,
                               const std::vector<std::int64_t>& send_counts,
                               const std::vector<std::int64_t>& recv_counts) {
  const auto report = [&](int from, int to, std::int64_t count,
                          const std::string& does) {
    const std::string way = std::to_string(from) + ">" + std::to_string(to);
    world_->line().report_call(
        key + "/" + way, join_ranks({world_rank(from), world_rank(to)}),
        std::to_string(count),
        text_of(call) + ", which " + does + " " + std::to_string(count) +
            " elements of the message " + way);
  };
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    report(rank(), r, send_counts[static_cast<std::size_t>(r)], "sends");
    report(r, rank(), recv_counts[static_cast<std::size_t>(r)], "expects");
  }
}

// --- Messages ----------------------------------------------------------------

std::string NcclGroup::way(int from, int to) const {
  return id_ + "/" + std::to_string(from) + ">" + std::to_string(to);
}

std::shared_ptr<NcclCall> NcclGroup::open_message(const CommCall& call,
                                                  int from, int to) {
  const std::string text = text_of(call);
  world_->check(text);
  const std::string messages = way(from, to) + "/" + std::to_string(call.tag);
  const std::string key =
      messages + "/" + std::to_string(num_messages_[messages]++);
  const std::string signature = std::string(dtype_name(call.dtype)) + "[" +
                                std::to_string(call.numel) + "]";
  world_->line().report_call(
      key, join_ranks({world_rank(from), world_rank(to)}), signature, text);
  return std::make_shared<NcclCall>(world_, text, key, timeout_, Tensors());
}

Work NcclGroup::do_send(const Tensor& tensor, const CommCall& call) {
  check_device(tensor, world_->device(), text_of(call));
  const int to = call.root_or_peer;
  return world_->send(way(rank(), to), world_rank(to),
                      open_message(call, rank(), to), tensor, call.tag);
}

Work NcclGroup::do_recv(const Tensor& tensor, const CommCall& call) {
  check_device(tensor, world_->device(), text_of(call));
  const int from = call.root_or_peer;
  return world_->recv(way(from, rank()), open_message(call, from, rank()),
                      tensor, call.tag);
}

}  // namespace shardbook::internal
