/* s3_store.h: a store in a bucket of S3, or of anything that speaks its language: `s3://BUCKET/PREFIX`.
 *
 * Objects of the checkpoint NAME lie flat under PREFIX/NAME/, so that PyTorch reads them as they are:
 *
 *   __{rank}_{n}.distcp           data; n has the attempt's number in it, so that two attempts never write one key
 *   .dcpd-{attempt}-.dcpd.json    dcpd's pages, likewise; seen as .dcpd.json by who reads the checkpoint of that attempt
 *   .metadata                     the commit: written last, under a condition, and marked with the attempt's number
 *   PREFIX/.dcpd/…                a mark of each attempt under way, by which a sweep finds what is left of it
 *
 * Commit: PUT of .metadata with If-None-Match: *, or with If-Match and the ETag of the one that is replaced. The server decides between
 * several; a server that ignores conditions is found out before the first one, and refused.
 *
 * Files whose names are given (copies, saves that PyTorch plans, formats with an index) could meet: their uploads are completed by the
 * commit only. It first claims the commit's place (a small object under If-None-Match, which counts as no checkpoint), then completes
 * the files, each under If-None-Match, then replaces the claim by the real one under If-Match. To replace a checkpoint the claim takes the
 * place of the old commit when all bytes are on the server, and the mark lists the uploads: from then on the commit goes on only, by
 * whoever finds it. A checkpoint that is one file is its own commit. A job that another node may take over claims the commit's place,
 * too: its owner may be stopped before its last write, and go on when the checkpoint of the next owner is removed already.
 *
 * A copy keeps the names, and so has data with the number of the attempt that saved it, marked with that of the attempt that copied it.
 *
 * Removal: a claim takes the place of the commit under If-Match, then the files go, then the claim. Into the trash: s3_store_trash.c.
 *
 * Files of what was replaced or removed are deleted behind that, by keys which others may use again meanwhile: s3_store_clear.c. Two things
 * keep a new checkpoint's file under such a key. Before each request the deleter's own commit or claim must still lie there: who takes
 * its place puts files there only behind that, and removes itself what is left. And each object goes only if its ETag is the listed
 * one, where the server heeds that of a DELETE (AWS does), which also keeps what tools without claims put there. What is left open: a
 * process that is stopped between that look and its request deletes a file of the same name that was put there meanwhile, if that has
 * the same bytes, or if the server heeds no ETags.
 *
 * Nothing keeps a removed object for who reads it: a load of a checkpoint that is replaced or removed meanwhile fails, by
 * checkpoint_replaced or not_found, and never gets mixed bytes (each read tells the ETag). */
#pragma once
#include "store/store.h"

extern const struct store_ops s3_ops;
