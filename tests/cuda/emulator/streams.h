#pragma once

// Streams and events of the stand-in: queues of work that nobody does before
// somebody waits.
//
// A real stream works at a pace of its own, and a missing wait may go unnoticed
// for years. Here a stream stands still until a thread of the host waits for it
// or for an event in it; then just as much is done as that takes. A kernel that
// should have been waited for has then not run, whoever reads its result finds
// the pattern of new memory. The opposite mistake, to write too early to what
// another stream still reads, shows with seeds above 1, which now and then run
// other streams first.

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emulator {

struct Stream;
struct Capture;

struct Work {
  std::string name;
  std::function<bool()> poll;  ///< true when done
  // Instead of poll: a wait for another stream.
  std::shared_ptr<Stream> other = nullptr;
  std::uint64_t position = 0;
  /// Pinned memory that it reads or writes.
  const char* host = nullptr;
  std::size_t host_bytes = 0;
};

struct Stream {
  int device = 0;
  int number = 0;
  bool is_blocking = true;  ///< waits for the null stream, and it for this
  std::uint64_t issued = 0, done = 0;
  std::deque<Work> queue;
  int queries = 0;
  /// While it captures (capture.h): the nodes that its next work runs after.
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tips;
};

struct Event {
  int device = 0;
  std::shared_ptr<Stream> stream;  ///< null until it is recorded
  std::uint64_t position = 0;
  int queries = 0;
  std::shared_ptr<double> time;  ///< of the last record
  /// The capture that it was recorded in, and where; null for a time.
  std::shared_ptr<Capture> capture;
  std::vector<std::size_t> tips;
};

/// Everything the runtime knows. Its lock is held by whoever is inside.
struct Runtime {
  static Runtime& instance();

  std::mutex mutex;
  std::condition_variable changed;
  int num_devices = 4;
  std::size_t device_bytes;
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> working;  ///< destroyed ones, too
  std::map<int, std::shared_ptr<Stream>> null_streams;
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<Capture*, std::shared_ptr<Capture>> graphs, executables;
  int next_stream = 0;
  std::map<int, std::string> failures;  ///< of kernels, by device
  std::map<std::string, std::pair<int, cudaError_t>> planted;
  std::map<std::string, int> num_calls;  ///< by function

  using Lock = std::unique_lock<std::mutex>;
  std::shared_ptr<Stream> make_stream(bool is_blocking);
  /// The device's null stream for null; null for one that does not exist.
  std::shared_ptr<Stream> find(cudaStream_t stream);
  /// Puts work on the stream, or into what it captures.
  cudaError_t add(const std::shared_ptr<Stream>& stream, Work work, Lock& lock);

  /// Works until `stream` has done its first `position` pieces; waits for other
  /// threads of the host where these have to do something first.
  void advance(const std::shared_ptr<Stream>& stream, std::uint64_t position,
               Lock& lock);
  void advance_device(int device, Lock& lock, bool blocking_only = false);
  /// The same without waiting for others.
  bool try_advance(Stream& stream, std::uint64_t position);

 private:
  bool step(Stream& stream);
  bool step_any(const Stream* except);
};

/// What the calling thread was told last.
cudaError_t report(cudaError_t error, const std::string& text = "");
/// The error of `function`, which was given a handle of nothing ("stream").
cudaError_t gone(const char* function, const char* what);
/// The failure of a kernel on this device, if there is one.
cudaError_t report_failure(Runtime& runtime, int device);
/// The error that a test has planted here. Counts the call.
cudaError_t planted(Runtime& runtime, const char* function);
int current_device();
/// A wait for an event, or by a stream, that is captured.
cudaError_t capture_wait(Stream& stream, const Event& event);

}  // namespace emulator

/// Opens every function of the runtime: takes the lock, and returns the error
/// that a test has planted there.
#define EMULATOR_ENTER()                                              \
  Runtime& runtime = Runtime::instance();                             \
  Runtime::Lock lock(runtime.mutex);                                  \
  if (const cudaError_t error = emulator::planted(runtime, __func__); \
      error != cudaSuccess) {                                         \
    return error;                                                     \
  }
