// The two run-time switches: check mode (PAGEDKERN_CHECK) and the log (PAGEDKERN_LOG).
#pragma once

#include <string>

namespace pagedkern::bindings {

// Rule 9 of the op contract: validate what the index tensors and inputs hold, and raise from the call itself.
bool check_mode();

bool log_enabled();

// Writes "pagedkern: <line>" to stderr, once per different line.
void log_once(const std::string& line);

}  // namespace pagedkern::bindings
