// Text as JSON writes it. Pure.
#pragma once

#include <string>

namespace tide {

// In quotes, with what JSON does not take escaped.
std::string quoted(const std::string& text);

}  // namespace tide
