// Search runs in a worker, which browsers refuse to pages that were opened from a disk. There a frame
// of the same page takes the worker's part: a script may be loaded into it, and messages handed over,
// as copies and later, as a worker's are.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const scope = (this.scope = this.frame.contentWindow);
      scope.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => {
          this.dispatchEvent(event);
          this.onmessage?.(event);
        });
      };
      this.loaded = this.load(url);
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = done;
        script.onerror = failed;
        this.frame.contentDocument.head.append(script);
      });
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data: copy })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
