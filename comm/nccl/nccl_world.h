#pragma once

// One rank's part of a world of backend "nccl": its GPU, the line to the
// coordinator, and the calls that the device has not finished.
//
// Life of a call. It is *issued*: put on a stream of its group, behind an event
// that marks all work given to the rank's current stream so far. The host goes
// on. wait() puts a second event, recorded after the call, in front of the
// rank's current stream; the host does not wait. A message is issued later,
// when both ends are known (nccl_messages.h), and its wait() waits until then.
//
// The coordinator hears of every call, as with gloo, so it finds calls that
// differ, ranks that never come, and waits that take too long. A thread, the
// watchdog, checks the events and the errors that NCCL reports for calls in
// flight. At the first failure, of whatever kind, it aborts all communicators,
// which ends the calls that wait on the device; every call of every rank throws
// from then on. Values that the device had not finished by then are undefined,
// and a host that read them learns of the failure at its next call or at the
// end of its body.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/launch.h"
#include "comm/nccl/nccl_library.h"
#include "comm/processes.h"
#include "comm/processes/control_line.h"
#include "comm/processes/rendezvous.h"
#include "comm/work.h"
#include "core/internal/cuda_device.h"
#include "core/internal/device_runtime.h"
#include "core/tensor.h"

namespace shardbook::internal {

class NcclMessages;
class NcclWorld;

/// A call from its issue until the device has finished it.
class NcclCall : public Work::State {
 public:
  /// `key`: the coordinator's meeting of this call. `buffers` live until the
  /// caller has waited, or else until the device has finished.
  NcclCall(const std::shared_ptr<NcclWorld>& world, std::string text,
           const std::string& key, std::chrono::milliseconds timeout,
           Tensors buffers);
  void wait() override;
  bool done() override;

  const std::string text;  ///< "all_reduce f32[10] over 'world'"

 private:
  friend class NcclMessages;
  friend class NcclWorld;

  // Guarded by the world's mutex.
  std::weak_ptr<NcclWorld> world_;
  Tensors buffers_;
  std::shared_ptr<void> block_;  // memory outside of the ledger
  int stream_ = -1;
  void* ready_ = nullptr;     // event: the caller's stream at the call
  void* finished_ = nullptr;  // event, once the call is issued
  bool has_ended_ = false;
  std::unique_ptr<ControlLine::Wait> wait_;
};

class NcclWorld : public std::enable_shared_from_this<NcclWorld> {
 public:
  /// Meets the other ranks. `device` is this rank's part of a GPU.
  NcclWorld(const RankEnvironment& environment, std::uint64_t generation,
            const LaunchOptions& options, const Device& device);
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  ControlLine& line() { return *line_; }
  NcclLibrary& library() { return library_; }
  const Device& device() const { return device_; }
  /// Throws RunError when something has failed anywhere in the world.
  void check(const std::string& text);
  /// Tells all ranks that this one failed; their calls throw.
  void fail(const std::string& reason);
  /// The same; returns when no call waits on the device any longer.
  void give_up(const std::string& reason);
  /// Waits for the calls in flight and ends this rank's part.
  void leave();

  using Communicator = std::shared_ptr<NcclCommunicator>;
  /// A communicator of these ranks, of which this is number `rank`: each calls
  /// it, under the same key. Returns when all of them have.
  Communicator join(const std::string& key, const std::vector<int>& ranks,
                    int rank, const std::string& name,
                    std::chrono::milliseconds timeout);
  /// Splits `parent`, whose calls run on `stream`, as NcclCommunicator::split
  /// does. All its ranks call it. Waits for its earlier calls.
  Communicator split(const Communicator& parent, int stream, int color, int key,
                     const std::string& name,
                     std::chrono::milliseconds timeout);
  /// A stream that nothing else uses, by its number on the device.
  int take_stream();
  void give_stream(int stream);

  using Run = std::function<void(NcclCommunicator&, void* stream)>;
  /// Issues a collective on `stream`. An empty `run` moves nothing.
  Work issue(const Communicator& communicator, int stream,
             std::shared_ptr<NcclCall> call, const Run& run);
  /// `way` names the group and the two ranks of a message; `to` is a world
  /// rank.
  Work send(const std::string& way, int to, std::shared_ptr<NcclCall> call,
            const Tensor& tensor, int tag);
  Work recv(const std::string& way, std::shared_ptr<NcclCall> call,
            const Tensor& tensor, int tag);

 private:
  friend class NcclCall;
  friend class NcclMessages;
  using Lock = std::unique_lock<std::mutex>;
  using Calls = std::vector<std::shared_ptr<NcclCall>>;

  void wait(NcclCall& call);
  bool done(NcclCall& call);
  [[noreturn]] void throw_failure(const std::string& text);
  Communicator make_communicator(const std::string& text,
                                 std::chrono::milliseconds timeout,
                                 const std::function<Communicator()>& make);
  void settle(const Communicator& communicator, const std::string& text);
  void* current_stream();

  // The caller holds the lock.
  int next_stream();
  void begin(const std::shared_ptr<NcclCall>& call);
  void put_in_line(NcclCall& call, int stream);
  void mark_issued(NcclCall& call, int stream);
  void end(NcclCall& call);
  void end_finished();
  void* take_event();
  std::shared_ptr<void> take_block(std::size_t bytes);
  void abort_all();

  void watch();

  const int rank_;
  const int size_;
  const Device device_;
  CudaDevice& gpu_;
  DeviceRuntime& runtime_;
  NcclLibrary& library_;
  const std::chrono::milliseconds timeout_;
  Rendezvous rendezvous_;
  std::unique_ptr<ControlLine> line_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_failed_ = false;
  bool is_aborted_ = false;
  bool is_stopping_ = false;
  Calls calls_;  // not known to have ended
  Calls ended_;  // released by the rank's own thread, which counts its memory
  std::vector<Communicator> communicators_;
  std::vector<int> free_streams_;
  int num_streams_;
  std::vector<void*> events_, free_events_;
  struct Blocks;
  std::shared_ptr<Blocks> blocks_;
  std::unique_ptr<NcclMessages> messages_;
  std::thread watchdog_;
};

}  // namespace shardbook::internal
