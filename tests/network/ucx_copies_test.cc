// Two UCX libraries in one process: a program of its own, as the first one that is loaded stays.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "transports/ucx/ucx_api.h"

namespace tide {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

TEST(UcxCopies, ARenamedCopyThatSomebodyLoadedIsRefused) {
  const char* library = std::getenv("TIDE_TEST_UCX_LIBRARY");
  if (library == nullptr) GTEST_SKIP() << "TIDE_TEST_UCX_LIBRARY names no library";
  const fs::path copy = fs::path(testing::TempDir()) / "libucp-f00d1234.so.0.0.0";
  fs::copy_file(library, copy, fs::copy_options::overwrite_existing);
  // Its dependencies are found by where the original lies.
  for (const char* name : {"libucs.so.0", "libuct.so.0"}) {
    ASSERT_NE(dlopen((fs::path(library).parent_path() / name).c_str(), RTLD_NOW | RTLD_LOCAL),
              nullptr)
        << dlerror();
  }
  ASSERT_NE(dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  const auto renamed = load_ucx({"", {library}});
  ASSERT_FALSE(renamed.is_ok());
  EXPECT_EQ(renamed.status().kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(renamed.status().message(),
              HasSubstr("brought its own copy of UCX into this process (" + copy.string()));

  ASSERT_NE(dlopen(library, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  const auto doubled = load_ucx({"", {library}});
  ASSERT_FALSE(doubled.is_ok());
  EXPECT_THAT(doubled.status().message(), HasSubstr("this process holds more than one UCX"));
  EXPECT_THAT(doubled.status().message(), HasSubstr(copy.string()));
  fs::remove(copy);
}

}  // namespace
}  // namespace tide
