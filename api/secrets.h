/* secrets.h: files with secrets: the token that callers over TCP show, a certificate's key. */
#pragma once
#include "base/err.h"

FALLIBLE enum err secrets_text(const char *path, char **text_out);     /* at most a MiB; the caller frees it */
/* Reads the token, and makes the file if there is none. */
FALLIBLE enum err secrets_token(const char *path, char **text_out);
