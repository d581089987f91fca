#include "bindings/mode.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "bindings/checks_only.h"

namespace pagedkern::bindings {
namespace {

bool set_in_environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' && std::strcmp(value, "0") != 0;
}

std::atomic<bool> check_flag{set_in_environment("PAGEDKERN_CHECK")};
std::atomic<bool> log_flag{set_in_environment("PAGEDKERN_LOG")};

}  // namespace

bool check_mode() {
  return check_flag.load(std::memory_order_relaxed) && checks_only_level() != 1;
}

bool log_enabled() {
  return log_flag.load(std::memory_order_relaxed);
}

void log_once(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> seen;
  const std::lock_guard<std::mutex> lock(mutex);
  if (seen.insert(line).second) std::fprintf(stderr, "pagedkern: %s\n", line.c_str());
}

}  // namespace pagedkern::bindings

// For pagedkern/check.py and pagedkern/log.py, through ctypes. A value below 0 only asks; the former value is returned.
extern "C" __attribute__((visibility("default"))) int pagedkern_check_mode(int enabled) {
  using pagedkern::bindings::check_flag;
  return enabled < 0 ? check_flag.load() : check_flag.exchange(enabled != 0);
}

extern "C" __attribute__((visibility("default"))) int pagedkern_log(int enabled) {
  using pagedkern::bindings::log_flag;
  return enabled < 0 ? log_flag.load() : log_flag.exchange(enabled != 0);
}
